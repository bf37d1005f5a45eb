"""Domain deploy: a trained model outside its run. `export` writes it to a folder; `eval` and `predict` run it on data.

On the login node, without torch:

    verbs.py           the verbs and what they print
    export.py          `export`: checks what is asked for, and writes the folder completely or not at all
    evaluate.py        `eval` and `predict`: of a run's checkpoint or of an export
    request.py         the choice of checkpoint, weights and data, as plain values for the process with torch
    exported.py        formats and files of an export's folder, and its card read back
    report.py          the section of `hpc-trainer report` that compares exports

In a process with torch that `export.py` or `evaluate.py` starts:

    export_torch.py    writes the file, compares its outputs with the model's, measures both, and writes the card
    evaluate_torch.py  metrics, and a prediction for each sample
    trained.py         the model of a checkpoint, and data to evaluate it on
    graphs.py          files that hold a graph (torch_export, ONNX), and quantization
    card.py            the text of the card and of load.py
"""

CONTRIBUTES = {
    "verbs": ("hpc_trainer.deploy.verbs:verbs",),
    "report_options": ("hpc_trainer.deploy.report:REPORT_OPTIONS",),
    "sweep_keys": ("hpc_trainer.deploy.exported:SWEEP_KEYS",),
}
"""Contributions of this domain to the hooks of the core (hpc_trainer/domains.py)."""
