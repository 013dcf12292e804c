"""Two models, of which a loss trains one and reaches the other: adversaries, averaged teachers, distillation."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from support.programs.parts import BATCHES, Losses, Make, Net, follow, integers, normals

IMAGE, NOISE, CLASSES, BATCH = 64, 16, 10, 32
temperature = 4.0  # of the distillation: a global that is annealed
consistency = 0.0  # the weight of the mean teacher: a global that ramps up


class Adversaries:
    """A GAN: two models with an optimizer each, each a constant of the other's loss; a label that is reassigned."""

    def __init__(self, make: Make, width: int) -> None:
        generator = Net([NOISE, width, 2 * width, IMAGE], nn.gelu)
        discriminator = nn.Sequential(Net([IMAGE, 2 * width, width], nn.gelu), nn.Dropout(0.1), nn.Linear(width, 1))
        self.generator, self.discriminator = generator, discriminator
        self.models = [generator, discriminator]
        self.images = [mx.tanh(image) for image in normals(BATCH, IMAGE)]
        real_label = mx.array(0.8)

        def harden() -> None:
            nonlocal real_label
            real_label = mx.minimum(real_label + 0.02, 1.0)

        def judge(judged: mx.array, label: mx.array | float) -> mx.array:
            return nn.losses.binary_cross_entropy(judged, mx.full(judged.shape, label))

        def discriminator_loss(discriminator: nn.Module, real: mx.array) -> mx.array:
            fake = mx.tanh(generator(mx.random.normal((BATCH, NOISE))))
            return judge(discriminator(real), real_label) + judge(discriminator(mx.stop_gradient(fake)), 0.0)

        def generator_loss(generator: nn.Module) -> mx.array:
            return judge(discriminator(mx.tanh(generator(mx.random.normal((BATCH, NOISE))))), 1.0)

        self.harden = harden
        self.learn_discriminator = make(discriminator, optim.Adam(2e-3, betas=[0.5, 0.999]), discriminator_loss)
        self.learn_generator = make(generator, optim.Adam(2e-3, betas=[0.5, 0.999]), generator_loss)

    def round(self, number: int) -> Losses:
        losses = [self.learn_discriminator(self.images[number % BATCHES]), self.learn_generator()]
        self.harden()
        return losses


class AdversariesAsArguments(Adversaries):
    """A WGAN whose losses take the other model as an argument."""

    def __init__(self, make: Make, width: int) -> None:
        super().__init__(make, width)

        def critic_loss(critic: nn.Module, generator: nn.Module, real: mx.array) -> mx.array:
            fake = mx.tanh(generator(mx.random.normal((BATCH, NOISE))))
            return critic(mx.stop_gradient(fake)).mean() - critic(real).mean()

        def generator_loss(generator: nn.Module, critic: nn.Module) -> mx.array:
            return -critic(mx.tanh(generator(mx.random.normal((BATCH, NOISE))))).mean()

        self.learn_critic = make(self.discriminator, optim.RMSprop(1e-3), critic_loss)
        self.learn_player = make(self.generator, optim.RMSprop(1e-3), generator_loss)

    def round(self, number: int) -> Losses:
        losses = [self.learn_critic(self.generator, self.images[number % BATCHES])]
        return [*losses, self.learn_player(self.discriminator)]


class MeanTeacher:
    """Consistency with a teacher that follows the student (Tarvainen and Valpola, 2017), its weight a global."""

    def __init__(self, make: Make, width: int) -> None:
        student, teacher = (
            nn.Sequential(nn.Linear(IMAGE, width), nn.BatchNorm(width), nn.ReLU(), nn.Linear(width, CLASSES))
            for _ in range(2)
        )
        teacher.update(student.parameters())
        teacher.freeze()
        teacher.eval()  # its statistics follow too
        self.student, self.teacher = student, teacher
        self.models = [student, teacher]

        def loss(student: nn.Module, x: mx.array, y: mx.array) -> mx.array:
            noisy, other = (x + 0.1 * mx.random.normal(x.shape) for _ in range(2))
            logits, wanted = student(noisy), mx.softmax(teacher(other), axis=-1)
            supervised = nn.losses.cross_entropy(logits, y, reduction="mean")
            return supervised + consistency * (mx.softmax(logits, axis=-1) - wanted).square().sum(axis=-1).mean()

        self.learn = make(student, optim.SGD(0.05, momentum=0.9), loss)
        self.batches = list(zip(normals(BATCH, IMAGE), integers(CLASSES, BATCH), strict=True))

    def round(self, number: int) -> Losses:
        global consistency
        consistency = 3.0 * min(1.0, number / 8)
        loss = self.learn(*self.batches[number % BATCHES])
        follow(self.teacher, self.student, 0.05)
        return [loss]


class Distillation:
    """A large teacher in the closure, an annealed temperature among the globals."""

    def __init__(self, make: Make, width: int) -> None:
        student, teacher = Net([IMAGE, width, CLASSES]), Net([IMAGE, 4 * width, 4 * width, CLASSES])
        teacher.freeze()
        self.models = [student]

        def loss(student: nn.Module, x: mx.array, y: mx.array) -> mx.array:
            logits = student(x)
            soft = [each - mx.logsumexp(each, axis=-1, keepdims=True) for each in (logits, teacher(x))]
            soft = [each / temperature - mx.logsumexp(each / temperature, axis=-1, keepdims=True) for each in soft]
            divergence = nn.losses.kl_div_loss(*soft, reduction="mean")
            return 0.5 * nn.losses.cross_entropy(logits, y, reduction="mean") + temperature**2 * divergence

        self.learn = make(student, optim.AdamW(2e-3), loss)
        self.batches = list(zip(normals(BATCH, IMAGE), integers(CLASSES, BATCH), strict=True))

    def round(self, number: int) -> Losses:
        global temperature
        temperature = 1.0 + 3.0 * 0.9**number
        return [self.learn(*self.batches[number % BATCHES])]
