"""Launching: the processes of a run on one or several nodes, by torch's elastic agent.

`options` parses --nproc, --nnodes and the like without torch; `agent` starts and watches the workers and hands stop
signals on to them; `node_meeting` is the rendezvous of nodes; `root_cause` finds the rank that failed first.
"""
