"""EET Lab: a Jupyter-first workbench for transformer optimizations.

Three lines compare two recipes on the bundled model:

    import eet_lab
    result = eet_lab.compare(eet_lab.load("demo"), ["Return a list of"], recipe="all")
    result.to_frame()

And one reads texts with an encoder:

    vectors = eet_lab.encode(eet_lab.load("folder of a BERT"), ["a text", "another"]).vectors
"""

from __future__ import annotations

from eet_lab.imports import on_demand

__version__ = "0.1.0"

_HOMES = {
    "load": "eet_lab.models",
    "Model": "eet_lab.models",
    "PRESETS": "eet_lab.models",
    "ENCODER_PRESETS": "eet_lab.models",
    "SEQ2SEQ_PRESETS": "eet_lab.models",
    "register_attention": "eet_lab.models.hf_attention",
    "generate": "eet_lab.texts",
    "encode": "eet_lab.encoding",
    "classify": "eet_lab.encoding",
    "classify_tokens": "eet_lab.encoding",
    "fill_mask": "eet_lab.encoding",
    "pipeline": "eet_lab.pipelines",
    "serve": "eet_lab.serving.handle",
    "serve_replicas": "eet_lab.serving.replicas",
    "Settings": "eet_lab.engine.settings",
    "Engine": "eet_lab.engine.engine",
    "Seq2SeqEngine": "eet_lab.engine.seq2seq",
    "Trainer": "eet_lab.training",
    "TrainSettings": "eet_lab.training",
    "FlatAdamW": "eet_lab.parts.optimizers",
    "FlatSGD": "eet_lab.parts.optimizers",
    "losses": "eet_lab.losses",
    "training": "eet_lab.training",
    "scheduling": "eet_lab.scheduling",
    "serving": "eet_lab.serving",
    "bench": "eet_lab.bench",
    "Recipe": "eet_lab.technique",
    "Technique": "eet_lab.technique",
    "register": "eet_lab.technique",
    "knob": "eet_lab.technique",
    "compare": "eet_lab.bench",
    "ladder": "eet_lab.bench",
    "fusion_map": "eet_lab.bench.fusion",
    "training_timelines": "eet_lab.bench.timeline_steps",
    "load_result": "eet_lab.bench",
    "plot": "eet_lab.figures",
    "Workbench": "eet_lab.workbench",
    "ServingView": "eet_lab.workbench.serving_view",
    "TrainView": "eet_lab.workbench.train_view",
}

__all__ = ["__version__", *_HOMES]


__getattr__ = on_demand(__name__, _HOMES)  # `import eet_lab` alone loads no torch and no widgets


def __dir__() -> list[str]:
    return sorted(__all__)
