"""`ep-a2a doctor`: the state of this machine, what would go wrong on it, and the remedies.

The command runs where torch or Triton is absent or broken: only the self-test imports them. A process of its own
(ask.py) asks each library and the CUDA driver, which may fail, crash or hang.

probe.py makes a Machine (machine.py): facts without judgement, so that tests can describe any broken machine. checks.py
is the table of all checks; each makes Findings (finding.py) of a Machine. report.py is the command.
"""
