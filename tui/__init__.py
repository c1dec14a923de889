"""The TUI: `penstock tui` shows agents, tools, releases and training live, in a terminal, and lets people act.

It sees `gateway.model`, `gateway.client` and `gateway.display`: what it shows is what `penstock ...` prints. A screen
is a `View` (`view`): it asks the gateway, and draws what it was told as rows and panes. Views know no terminal. `app`
and `widgets` show any of them with Textual; `plain` prints them once as text. Begin with `view`, then `app`.
"""
