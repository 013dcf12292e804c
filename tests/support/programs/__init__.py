"""Programs of the kinds that people train with MLX, written after the shapes of published ones; plain MLX only.

A program takes its steps by what it is given (`parts.Make`), so that the tests and the benchmarks run each one with the
plain loop, with `mx.compile` and with the package's step. What changes between the steps is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from support.programs import agents, language, pairs, schedules, vision
from support.programs.parts import Make


@dataclass(frozen=True)
class Program:
    """A kind of program.

    Attributes:
        title: What the report calls it.
        kind: Its class.
        compiled: Whether the published ones compile their steps.
        width: How wide its layers are in the benchmarks.
        compilable: Whether `mx.compile` takes its arguments: no modules, no dataclasses, nothing of NumPy.
    """

    title: str
    kind: Callable[[Make, int], Any]
    compiled: bool = False
    width: int = 64
    compilable: bool = True

    def new(self, make: Make, width: int | None = None) -> Any:
        """Build it, equal each time."""
        mx.random.seed(5)
        program = self.kind(make, width or self.width)
        mx.eval([model.parameters() for model in program.models])
        mx.random.seed(9)
        return program


PROGRAMS = {
    "gan": Program("GAN: two models, two optimizers", pairs.Adversaries),
    "wgan": Program("WGAN: the other model an argument", pairs.AdversariesAsArguments, compilable=False),
    "sac": Program("SAC agent: methods, targets, entropy", agents.SoftActorCritic),
    "dqn": Program("DQN agent: target, annealed exponent", agents.DeepQ),
    "ppo": Program("PPO agent: annealed clip range", agents.ProximalPolicy),
    "teacher": Program("mean teacher: average, global ramp", pairs.MeanTeacher),
    "distillation": Program("distillation: global temperature", pairs.Distillation),
    "nerf": Program("NeRF: two fields, one optimizer", pairs.RadianceFields, compiled=True),
    "dpo": Program("DPO: LoRA, reference, dataclass", language.DirectPreference, compiled=True),
    "lora": Program("LoRA on a checkpointed Llama", language.FineTuning, compiled=True),
    "moe": Program("mixture of experts", language.MixtureOfExperts, compiled=True),
    "recurrent": Program("recurrent net that carries its state", language.TruncatedBackpropagation),
    "annealed": Program("numbers on the model, dict batch", schedules.Annealed, compilable=False),
    "curriculum": Program("curriculum: weights in a dict", schedules.Curriculum, compilable=False),
    "trainer": Program("trainer class with a metric", schedules.Trainer),
    "graph": Program("graph network, dataclass batch", schedules.GraphNetwork, compilable=False),
    "diffusion": Program("diffusion: a new loss each step", vision.Diffusion, width=16),
    "resnet": Program("ResNet with BatchNorm", vision.ResidualNetwork, compiled=True, width=16),
    "keyword": Program("keyword transformer", vision.KeywordTransformer, compiled=True),
}
