"""Reports of runs, with the evidence for each figure: `result` is the stored form, everything else is made from it.

result.json --result--> RunResult --figures--> RunFigures --pages--> what a person reads
"""
