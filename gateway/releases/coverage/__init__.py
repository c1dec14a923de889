"""Coverage: matched and missed calls are counted per resource; a fall is reported and holds canaries.

Calls note their prompts (`monitor.CallNotes`), which costs them one entry in a list. Once a second `monitor` finds out
in a thread which prompt an unrecognised text is nearly (`gateway.releases.prompts.recogniser`), and an operation adds
it up on the tape (`operations`), where `gateway.releases.canary.decision` decides whether the coverage has fallen.
"""
