"""Sharded tensors (DTensor) in checkpoints: files contain full tensors, and no rank ever holds a full tensor that is sharded.

`sharded_tensors` slices and places tensors, `partition` divides a state between the ranks that write it, and `exchange`
streams the slices of all ranks to the writers.
"""
