"""Describe a job as a user gives it: frozen records that are checked when made, without times or traffic.

fields.py    records of tables of a file, and what is said of a field that is wrong
model.py     `Model`, `find_model` for those with a name (models.toml), parameters and FLOP
parallel.py  `Parallel`, `Training`, `Compression`; how layers are divided among the stages of a pipeline
cluster.py   `Cluster`: a GPU, by name or by its figures, and the levels of network above it
job.py       `Job`, which joins them, and the reader of its TOML file; `Run`, the whole training
changes.py   changes of a job by flags and fields, and sweeps over their values
foreign/     readers of config.json of Hugging Face and of the arguments that Megatron-LM prints
"""
