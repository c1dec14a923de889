"""The screens: each is a `ScreenView`. Pure, except for their questions to the gateway."""
