"""The stage *shadowed*: live calls are also sent to the candidate. Begin with `stage`."""
