"""Predict the compute time and the memory of one rank, without any network.

operations.py  one operation, as shapes and bytes
layers.py    the operations of a layer
roofline.py  the time of one operation, and what is reached of a GPU's data sheet
memory.py    GiB of the fullest GPU, and the verdict whether a job fits
"""
