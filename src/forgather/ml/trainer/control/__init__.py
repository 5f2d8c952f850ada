"""Control of a running job: requests of `forgather control`, which all ranks carry out at the same step.

`desk.py` receives and serves requests, `status.py` describes the job, `settings.py` changes arguments.
"""
