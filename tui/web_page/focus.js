// Gives the terminal the keyboard as soon as it shows something, and whenever the tab is come back to.
addEventListener("DOMContentLoaded", () => {
  const focus = () => document.querySelector(".xterm-helper-textarea")?.focus();
  new MutationObserver(focus).observe(document.body, { attributeFilter: ["class"] });
  addEventListener("focus", focus);
});
