"""Holds `libheadway_kernels.so`; `headway.kernels.native` finds it here. There is nothing to import."""
