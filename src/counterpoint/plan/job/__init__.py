"""Describe a job as a user gives it: frozen records, checked when they are made; no times, no bytes on the wire.

fields.py    which values fields may have, and what is said of others
model.py     `Model`, `find_model` for those with a name (models.toml), parameters and FLOP
parallel.py  `Parallel`, `Training`, `Compression`; how layers are divided among the stages of a pipeline
cluster.py   `Cluster`: a GPU, by name or by its figures, and the levels of network above it
run.py       `Run`: the whole training, its failures and prices
job.py       `Job`, which joins them, and the reader of its TOML file
what_if.py   changes of a job: `Job -> Job`
foreign/     readers of config.json of Hugging Face, Megatron-LM's arguments, torchtitan's files
"""
