"""`ep-a2a bench`: contenders are checked, then timed, on the same inputs in the same run."""
