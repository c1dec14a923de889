"""The screens: each is a `View`. Pure, except for their questions to the gateway."""
