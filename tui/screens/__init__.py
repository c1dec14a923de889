"""The screens: each is a `View`. Pure but for the questions that they ask the gateway."""
