"""The screens: each is a `ScreenView`. Pure, except for their questions to the gateway. `chart` and `span_panes` draw
what no `penstock ...` command prints in this form.
"""
