"""Effects of the policies as claims, each a number with a bound, on the production scheduler under a virtual clock."""
