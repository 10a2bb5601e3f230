"""Which schedulers and guides another engine can serve: those that need no more than the logits of a block."""

from __future__ import annotations

from dllm_sampler.core.naming import named
from dllm_sampler.core.protocols import Scheduler
from dllm_sampler.core.spec import Traits
from dllm_sampler.engine.plugins import Plugins


def obstacle(plugins: Plugins) -> str | None:
    """Why the logits of one block are not all that the plug-ins want; None: they are."""
    for guide in plugins.guides:
        if guide.vetoes:
            return f"guide={named(guide)} judges whole answers, and an engine shows one block: use json_schema or regex"
        if guide.forms:
            return f"guide={named(guide)} has a list of forms, and an engine's requests name none of them: give it one"
    if "hidden" in plugins.needs:
        name = named(plugins.scheduler)
        return f"scheduler={name} needs hidden states, and engines hand over logits only: use another, threshold say"
    return beyond(plugins.scheduler)


def beyond(scheduler: Scheduler) -> str | None:
    """Why the logits of one block are not all that a scheduler wants, as far as it says so before it is bound."""
    why = reason(scheduler.traits)
    return why and (
        f"scheduler={named(scheduler)} needs more than the logits of a block, which are all that an engine hands over:"
        f" {why}; use another scheduler, threshold say"
    )


def reason(traits: Traits) -> str | None:
    """What a scheduler wants beyond the logits of a block; None: nothing."""
    if traits.scope != "model":
        return None
    if traits.initial is not None:
        return "it changes the length of the answer"
    if traits.leave_one_out:
        return "it adds shadow rows to the forward"
    if traits.drafts:
        return "it asks about several states in one forward"
    if traits.shared:
        return "it asks a second model"
    return "it hides positions from the model" if traits.static else "it judges whole answers"
