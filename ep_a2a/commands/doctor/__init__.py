"""`ep-a2a doctor`: the state of this machine, what would go wrong on it, and the remedies.

The command runs where torch or Triton is absent or broken: only the self-test imports them. A process of its own
(ask.py) asks each library, which may fail, crash or hang.

probe.py makes a Machine and a Choice (machine.py): facts without judgement, so that tests can describe any broken
machine. checks.py makes findings of them. report.py is the command. selftest.py lets ranks exchange data.
"""
