"""An algorithm of `penstock train custom`: says a prompt in other words, and keeps what agents do best with."""

from statistics import mean

from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import RolloutConfig
from penstock.trainer.apo.custom import CustomRun


async def best_of(run: CustomRun) -> None:
    """Searches `count` paraphrases of the prompt `prompt`, which the model `model` writes."""
    name, model, count = run.config["prompt"], run.config["model"], run.config["count"]
    text = await run.text(name)
    asked = f"Say this in other words. Keep every {{slot}} as it is.\n\n{text}"
    texts = [text, *[(await run.ask(model, asked, number)).text for number in range(count)]]
    versions = dict.fromkeys([await run.add(name, one, "a paraphrase") for one in texts])
    scores: dict[str, float] = {}
    for step, version in enumerate(versions):
        config = RolloutConfig(versions={name: version})
        tasks = enumerate(run.tasks)
        specs = [RolloutSpec(id=f"{run.name}.{version}.{at}", input=task, config=config) for at, task in tasks]
        rewards = [rollout.reward for rollout in await run.run(specs) if rollout.reward is not None]
        scores[version] = mean(rewards) if rewards else 0.0
        await run.point(step, {"reward": scores[version]})
    best = max(scores, key=lambda version: scores[version])
    await run.made(name, best)
    await run.tell(f"{name}@{best} is the best of {len(scores)}: {scores[best]:.3f}")
