"""The runs of a configuration: one, or one for each seed; real ones, or ones with a placebo. Pure.

    run "shop", directory "out"      run      directory
    one                              shop     out
    with two seeds                   shop.s0  out/s0          seeds run.seed, run.seed + 1
                                     shop.s1  out/s1
    with a placebo                   shop.placebo, shop.placebo.s0 ...   out/placebo, out/placebo/s0 ...

Several runs, and those with a placebo, measure a method, and release nothing: choosing the best of them by the test
would make the test a validation, and a release of the first would change the texts that the second begins with.
"""

from __future__ import annotations

from penstock.trainer.apo.config import Config


def runs_of(config: Config) -> list[Config]:
    """Return the configuration of each run."""
    run = config.run
    if run.placebo:
        run = run.model_copy(update={"name": f"{run.name}.placebo", "directory": run.directory / "placebo"})
    if run.seeds is None:
        runs = [run]
    else:
        runs = [
            run.model_copy(
                update={
                    "name": f"{run.name}.s{at}",
                    "directory": run.directory / f"s{at}",
                    "seed": run.seed + at,
                    "seeds": None,
                }
            )
            for at in range(run.seeds)
        ]
    measures = run.placebo or run.seeds is not None
    publish = config.publish.model_copy(update={"release": "none"}) if measures else config.publish
    return [config.model_copy(update={"run": one, "publish": publish}) for one in runs]
