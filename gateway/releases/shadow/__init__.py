"""The stage *shadowed*: live calls are sent to the candidate too. It sees what `releases` sees. Begin with `stage`."""
