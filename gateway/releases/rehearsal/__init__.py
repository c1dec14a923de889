"""The stage *rehearsed*: the agent runs, and its tools are played from the tape. Begin with `stage`."""
