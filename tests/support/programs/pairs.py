"""Two models, of which a loss trains one and reaches the other, or that share an optimizer."""

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


class RadianceFields:
    """A coarse and a fine radiance field with one optimizer (Mildenhall et al., 2020), whose moments both move."""

    def __init__(self, make: Make, width: int) -> None:
        frequencies = 2.0 ** mx.arange(4)
        coarse, fine = (Net([3 * 2 * 4, width, width, width, 4]) for _ in range(2))
        self.models = [coarse, fine]
        optimizer = optim.Adam(2e-3)

        def weights(density: mx.array, depths: mx.array) -> mx.array:
            steps = mx.concatenate([mx.diff(depths, axis=-1), mx.ones((*depths.shape[:-1], 1))], axis=-1)
            seen = mx.exp(-nn.relu(density) * steps)
            passed = mx.cumprod(mx.concatenate([mx.ones_like(seen[:, :1]), seen[:, :-1]], axis=-1), axis=-1)
            return passed * (1 - seen)

        def render(field: nn.Module, rays: mx.array, depths: mx.array) -> tuple[mx.array, mx.array]:
            points = rays[:, None, :3] + depths[..., None] * rays[:, None, 3:]
            angles = (points[..., None] * frequencies).reshape(*depths.shape, -1)
            out = field(mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=-1))
            shares = weights(out[..., 3], depths)
            return (shares[..., None] * mx.sigmoid(out[..., :3])).sum(axis=1), shares

        def loss(field: nn.Module, rays: mx.array, depths: mx.array, colors: mx.array) -> tuple[mx.array, mx.array]:
            rendered, shares = render(field, rays, depths)
            return (rendered - colors).square().mean(), mx.stop_gradient(shares)

        self.learn_coarse, self.learn_fine = make(coarse, optimizer, loss), make(fine, optimizer, loss)
        self.rays = normals(BATCH, 6)
        self.colors = [mx.sigmoid(color) for color in normals(BATCH, 3, seed=1)]

    def round(self, number: int) -> Losses:
        rays, colors = self.rays[number % BATCHES], self.colors[number % BATCHES]
        depths = mx.sort(mx.random.uniform(0.1, 2.0, (BATCH, 8)), axis=-1)
        loss, shares = self.learn_coarse(rays, depths, colors)
        drawn = mx.random.categorical(mx.log(shares + 1e-3), num_samples=8)
        denser = mx.take_along_axis(depths, drawn, axis=-1) + mx.random.uniform(0, 0.1, (BATCH, 8))
        return [loss, self.learn_fine(rays, mx.sort(mx.concatenate([depths, denser], axis=-1), axis=-1), colors)[0]]
