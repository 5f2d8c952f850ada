"""Torch-free half of the rank watch: notes in shared memory, judgement of hangs, and the watcher process.

The watcher process imports only this package and the standard library, so that it starts in milliseconds. The half that
runs inside a rank is `forgather.ml.distributed.watch`.
"""
