"""An AdamW in nanochat's three phases: launch all reductions, step own slices, gather."""

import torch
import torch.distributed as dist


class DistAdamW(torch.optim.Optimizer):
    def __init__(self, param_groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(param_groups, defaults)

    @torch.no_grad()
    def step(self):
        trained = []
        for group in self.param_groups:
            trained += [(group, each) for each in group["params"] if each.grad is not None]
        launched = [(group, parameter, *self.launch(parameter)) for group, parameter in trained]
        gathers = []
        for group, parameter, gradient, work in launched:
            self.wait_for(work)
            own = self.own_slice(parameter)
            self.update(group, parameter, own, gradient / dist.get_world_size())
            gathers.append(dist.all_gather_into_tensor(parameter, own.clone(), async_op=True))
        for work in gathers:
            work.wait()

    def own_slice(self, parameter):
        return parameter.chunk(dist.get_world_size())[dist.get_rank()]

    def launch(self, parameter):
        ranks = dist.get_world_size()
        assert len(parameter) % ranks == 0, f"{ranks} ranks cannot share {len(parameter)} rows"
        gradient = torch.empty_like(self.own_slice(parameter))
        return gradient, dist.reduce_scatter_tensor(gradient, parameter.grad, async_op=True)

    def wait_for(self, work):
        work.wait()

    def update(self, group, parameter, own, gradient):
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(own), torch.zeros_like(own)
        state["step"] += 1
        one, two = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - one)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - two)
        mean = state["exp_avg"] / (1 - one ** state["step"])
        square = state["exp_avg_sq"] / (1 - two ** state["step"])
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


class WaitsForNoReduction(DistAdamW):
    """Steps with slices of gradients that have not arrived."""

    def wait_for(self, work):
        pass
