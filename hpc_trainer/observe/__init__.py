"""Observation of runs: telemetry, stragglers, flight records, profiles, and advice that follows from them.

    telemetry.py         samples of GPUs and hosts, and warnings about devices: the files in the run folder
    sampler.py           the thread of a rank that takes the samples, from nvidia.py, amd.py and host_counters.py
    telemetry_views.py   where the samples go: `status`, `why`, `results`, `report`
    stragglers.py        measurement of each rank's own work; straggler_log.py judges and records it
    flight_recorder.py   the last collectives of a rank, written when it fails; flight.py is the file, hang.py reads it
    profiler.py          profiles of some steps; profile_request.py asks for one, profile_figures.py reads it
    advice.py            advice for runs, from their facts (facts.py) by rules (rules_of_time.py, rules_of_resources.py)
    clues.py             findings of all of these for `why` and `report`; verbs.py has the verbs `advise` and `profile`

Only stragglers.py, flight_recorder.py and profiler.py import torch.
"""

CONTRIBUTES = {
    "verbs": ("hpc_trainer.observe.verbs:verbs",),
    "features": ("hpc_trainer.observe.features:FEATURES",),
    "samplers": ("hpc_trainer.observe.sampler:sampler_of",),
    "recorders": ("hpc_trainer.observe.flight_recorder:FlightRecorder",),
    "warnings": ("hpc_trainer.observe.telemetry:warning_line",),
    "clues": ("hpc_trainer.observe.clues:clues_of",),
    "result_columns": ("hpc_trainer.observe.telemetry_views:ENERGY_COLUMNS",),
    "report_parts": ("hpc_trainer.observe.clues:report_part",),
    "report_series": ("hpc_trainer.observe.telemetry_views:report_series",),
    "page_parts": ("hpc_trainer.observe.hang:page_part", "hpc_trainer.observe.telemetry_views:page_part"),
    "live_figures": ("hpc_trainer.observe.telemetry_views:live_figures",),
}
"""Contributions of this domain to the hooks of the core (hpc_trainer/domains.py)."""
