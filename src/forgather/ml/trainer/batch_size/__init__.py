"""Batch size after out-of-memory errors (`auto_find_batch_size`).

`finder` repeats a step, `splitting` divides its batches, and `late_reduction` averages gradients over ranks afterwards.
"""
