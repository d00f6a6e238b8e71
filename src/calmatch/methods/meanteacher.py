"""Mean Teacher, Tarvainen and Valpola 2017, https://arxiv.org/abs/1703.01780"""

from torch import nn

from calmatch.core import Task
from calmatch.methods.pimodel import PiModel


class MeanTeacher(PiModel):
    """Pi-model whose target comes from the averaged weights.

    USB's newest commit takes the student's logits from the teacher, so its loss is zero; this
    follows the commit before.
    """

    ema = 0.999

    def __init__(self, task: Task, *, weight: float = 50.0, ramp: float = 0.4) -> None:
        super().__init__(task, weight=weight, ramp=ramp)

    def teacher(self, net: nn.Module, ema: nn.Module) -> nn.Module:
        return ema
