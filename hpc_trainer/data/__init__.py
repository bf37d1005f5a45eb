"""Domain data: sources of samples, and the commands that prepare, check and measure them.

    NAME/__init__.py    keys of a kind of data set, and checks of its files on the login node: no torch
    NAME/dataset.py     the samples on a rank; `_target_` names it by its public name (`hpc_trainer/datasets`)
    prepare/            conversion of raw files to files that train fast
    reading.py          the process that reads a data set as training does, for `data check` and `data bench`
    commands.py         the commands and their options; verbs.py carries them out

Training knows a data set by `training/data/protocol.py`, the rest of the core by the methods of
`config/schema/data.py`.
"""

CONTRIBUTES = {
    "data_sets": (
        "hpc_trainer.data.generated:SyntheticImagesConfig",
        "hpc_trainer.data.generated:SyntheticTokensConfig",
        "hpc_trainer.data.text:TextBytesConfig",
        "hpc_trainer.data.images:ImageFolderConfig",
        "hpc_trainer.data.images:ImageShardsConfig",
        "hpc_trainer.data.tokens:TokensConfig",
        "hpc_trainer.data.arrays:ArraysConfig",
        "hpc_trainer.data.tables:TableConfig",
        "hpc_trainer.data.hf:HfDatasetConfig",
    ),
    "verbs": ("hpc_trainer.data.commands:verbs",),
}
"""Contributions of this domain to the hooks of the core (hpc_trainer/domains.py)."""
