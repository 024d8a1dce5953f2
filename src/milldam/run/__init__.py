"""The frame of every job: lock, plan, records, workers, progress. A job tells what only it knows; the rest is here.

job          the protocol of a job, and the only loop; the same job as tasks of a job array
folder       the run folder, locked: what was planned, what is done; presence: who is at work, and what they tell
identity     what a result depends on, and how two of them differ
inputs       the input, listed on disk, and what changed since
units        the plan's units on disk, and their keys
journal      lines appended durably
records      what is done of a stage, by key
session      runs the units of a stage on a pool of workers, and reports progress
planning     from the budget to a number of workers
progress     what a run tells while it works, and who listens
summary      what a finished job tells, the same for every job
monitor      memory of a process tree over time: process_tree, watching

tasks        what executors know of work
pools        who works on a stage: serial, local (server_handle, server, worker), ray_cluster (ray_node)
array_task   what one of several machines does of a stage; array_jobs: the script that queues them
lean_arrow   pyarrow without pandas, until somebody wants pandas
"""
