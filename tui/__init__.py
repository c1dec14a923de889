"""The TUI: `penstock tui` shows agents, tools, releases and training live, in a terminal, and lets people act.

It imports `gateway.model`, `gateway.client` and `console.views`, so it shows the same as `penstock ...` prints. A
screen is a `ScreenView` (`view`): it asks the gateway, and draws the answers as rows and panes. Views know no terminal.
`app` and `widgets` show any of them with Textual; `view` prints them once as text, too. Begin with `view`, then `app`.
"""
