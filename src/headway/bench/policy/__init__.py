"""What policies do, each claim as a number with a bar, on the production scheduler under a virtual clock."""
