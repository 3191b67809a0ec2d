"""Read jobs that were written for other software, as the tables of a job's file; no code in them is run.

read_job_file.py  which format a file has, and what flags must add to it
reading.py        values one by one, with account of what was read, assumed and left out
huggingface.py    config.json of Hugging Face: the model
megatron.py       the arguments that a run of Megatron-LM prints, and its YAML
"""
