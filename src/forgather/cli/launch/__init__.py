"""Launcher: starts the processes of a run on one or more nodes with torch's elastic agent.

`options` parses --nproc, --nnodes and so on without torch. `agent` starts and monitors the workers and forwards stop
signals to them. `node_meeting` is the rendezvous of nodes. `root_cause` finds the rank that failed first.
"""
