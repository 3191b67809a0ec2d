"""Hold the frozen records that one room hands to another and that `--json` prints, one file per verb.

diagnosis.py has those of `diagnose`, measurement.py of `measure` and of the controls that it checks, prediction.py of
`plan`, machine.py of `doctor`, watch.py of `watch`, hang.py of `diagnose` for a hang; base.py has what all of them are.
Import from these files. Records know nothing of what makes them; a schema's keys may be added, never renamed.
"""
