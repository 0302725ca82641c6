"""A wrapper that a batch has to be started for, and that forgets buffers."""

from .mistakes import ForgetsBuffers


class DDP(ForgetsBuffers):
    started = False

    def start(self):
        self.started = True

    def average(self, parameter):
        assert self.started, "a batch has not been started"
        super().average(parameter)
