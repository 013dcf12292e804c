"""A config without a mistake."""

GOOD = """\
model: {use: mlp, sizes: [8, 4]}
loss: {use: mse}
data:
  train: {use: arrays, file: data.npz}
  batch_size: 4
optimizer:
  use: AdamW
  learning_rate: 1e-3
train:
  steps: 10
"""
