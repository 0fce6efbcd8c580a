"""The clock of every wait on the host. Tests replace both functions by a clock of their own."""

import time

now = time.monotonic
"""Seconds; equal for all processes of one host."""
sleep = time.sleep
