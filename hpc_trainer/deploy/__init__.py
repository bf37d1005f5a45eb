"""Domain deploy: a trained model taken out of its run, to be exported, evaluated or asked for predictions.

Modules named `*_torch`, and what they import of this folder, run in a process with torch that the verbs start.
"""
