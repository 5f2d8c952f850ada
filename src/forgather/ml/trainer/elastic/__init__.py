"""Elastic training: steps of `global_batch_size` samples on any number of ranks, and restarts that learn from failures.

`step_shares` divides a step between ranks. `failure_notes` and `restart_policy` keep and judge `failures.jsonl`.
"""
