"""The frame of every job: lock, plan, records, workers, progress. A job implements what only it knows.

engine       a job, and the only loop; a session, in which the units of a stage are made
folder       the run folder, locked: what was planned, what is done, who is at work in it
units        what a result depends on; the plan on disk: the input and what changed since, units and their keys
records      what is done of a stage, by key, in lines appended durably
summary      what a run reports, while it works and when it is done, the same for every job
budget       how many workers the budget holds; memory of a process tree over time

tasks        what crosses to workers and comes back
pools        where units are made: in this process, by forked workers, on a Ray cluster
fork         the server that forks workers, the loop that hands out units, what a worker does
ray_cluster  units on the machines of a Ray cluster
array        the same job as tasks of a job array
"""
