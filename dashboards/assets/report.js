// Prints all of a report: paper can't unfold anything.
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)))
