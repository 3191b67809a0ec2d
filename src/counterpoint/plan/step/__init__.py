"""Predict the time of one training step: layers, exchanges between ranks, the pipeline's schedule, and its error.

step.py           `predict_step(job) -> PredictedStep`, which joins the others; the slowest of n ranks
layer_time.py     a layer, and a part of a stage, for one micro-batch
exchanges.py      operations and bytes of tensor, context, expert and pipeline parallelism
data_parallel.py  gradients and parameters of replicas and shards, compressed gradients
schedule.py       micro-batches through a pipeline
"""
