"""Define the frozen records that subpackages exchange and that `--json` prints, one file per subcommand.

diagnosis.py has those of `diagnose`, measurement.py of `measure` and of the controls that it checks, prediction.py of
`plan`, machine.py of `doctor`; base.py has their base class. Import from these files. Records import nothing of the
code that makes them. Keys may be added to a schema, never renamed.
"""
