"""Watch a training while it runs: record two steps now and then, diagnose them in another process, log one line.

`counterpoint.watch` is in api.py: no error in it reaches the training. optimizer_steps.py counts steps, recording.py
has the profiler, beside.py the process that reads and diagnoses, exporters.py where its answer goes besides the log.
lightning.py and trainer.py are callbacks for PyTorch Lightning and Hugging Face's Trainer; nothing else imports them.
"""
