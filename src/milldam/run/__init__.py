"""The run folder: what was planned, what is done, who is at work. It makes a job resumable.

    plan.json       settings and input fingerprint: what this run is
    inputs.jsonl    every input file with size and version, to name what changed
    units.jsonl     the units, one a line, in plan order; units.offsets: where each line is, and the unit's size
    records.jsonl   a line per finished part of a unit, appended after its shard is durable
    rejects-*.jsonl records that could not be read, a file per part that has any
    status.json     what is going on now, for `milldam status`
    memory.csv      the memory timeline
    lock            held while a run is at work
    shares/         a folder per array task, which another machine works on, with its own records and status

Nothing here is held in memory whole, however many units there are: units are read as they are handed out; of what is
done, a bit a unit is kept.

identity    what a result depends on
journal     lines appended durably
records     finished parts of units, and what is done by them
units       the plan's units on disk
folder      all of it, locked
"""
