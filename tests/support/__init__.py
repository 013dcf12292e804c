"""Shared parts of several tests; no test imports another test.

`helpers` and `models` are the plain-MLX side, `plain_loop`, `mixed` and `plans` further references, `stateful` steps
with every option that keeps something, `changes` what a program does between steps, `programs` whole small programs
(benches/clients.py measures them), `programs.reach` those of a few lines that `beside` runs beside their plain loops,
with `process` for what they change of it, `checkpointing`, `damage` and `continuation` for checkpoints, `encoder`,
`loaded`, `trained` and `configs` for data, training and configs, `places` for the folders and types of `conftest`.
"""
