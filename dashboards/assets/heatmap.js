// Switches, mouse and keys of the heatmap of ranks and steps. dashboards/plots/heatmap.py decides what is drawn and
// what a cell contains: this script sends requests, at most one at a time about what is under the pointer.
window.overlapscope.startHeatmap = (plot) => {
  const {root, step_range: steps} = plot
  const whole = [steps.start, steps.end]
  const area = document.getElementById("heatmap")
  const tip = window.overlapscope.tip(area)

  // --- switches -------------------------------------------------------------------------------------------------
  const radios = [...document.querySelectorAll(".switches input")]
  const chosen = (name) => radios.find((radio) => radio.name === name && radio.checked)?.value

  const choice = () => ({figure: chosen("figure"), grouping: chosen("grouping") ?? "ranks"})
  const room = () => Math.max(50, Math.floor(root.inner_width || area.clientWidth))

  function draw() {
    plot.choice.data = {figure: [choice().figure], grouping: [choice().grouping], columns: [room()]}
    leave()
  }

  function choose() {
    draw()
    window.overlapscope.setAddress(choice())
  }

  // Browsers shrink images by dropping columns, and with them what is late in a single step.
  function shrink() {
    if (plot.cells.data.image[0].shape[1] > room()) draw()
  }

  function showScale() {
    const texts = plot.scale.data
    for (const name of ["low", "half", "high", "largest"]) {
      document.getElementById(`scale-${name}`).textContent = texts[name][0]
    }
    document.body.dataset.shown = `${choice().figure} ${choice().grouping}`
  }

  // --- zoom and pan ---------------------------------------------------------------------------------------------
  function show(from, to) {
    const length = Math.min(Math.max(to - from, steps.min_interval), whole[1] - whole[0])
    const start = Math.min(Math.max((from + to - length) / 2, whole[0]), whole[1] - length)
    steps.setv({start, end: start + length})
  }

  function zoom(factor) {
    const at = pointer ?? (steps.start + steps.end) / 2
    show(at - (at - steps.start) * factor, at + (steps.end - at) * factor)
  }

  function move(share) {
    const by = (steps.end - steps.start) * share
    show(steps.start + by, steps.end + by)
  }

  function showAll() {
    show(...whole)
    const [top, bottom] = plot.row_range.bounds
    plot.row_range.setv({start: bottom, end: top})
  }

  const pick = (index) => () => radios.filter((radio) => radio.name === "figure")[index].click()
  const keys = {
    1: pick(0),
    2: pick(1),
    3: pick(2),
    w: () => zoom(0.8),
    s: () => zoom(1.25),
    a: () => move(-0.1),
    d: () => move(0.1),
    0: showAll,
  }

  window.overlapscope.onKeys(keys)

  // --- tooltips -------------------------------------------------------------------------------------------------
  let pointer = null
  let under = null
  let asked = 0
  let answered = 0
  let opens = 0

  function cellAt({x, y}) {
    const {image, x: left, y: top, dw, dh} = plot.cells.data
    const [rows, columns] = image[0].shape
    const column = Math.floor(((x - left[0]) / dw[0]) * columns)
    const row = Math.floor(((y - top[0]) / dh[0]) * rows)
    return row >= 0 && row < rows && column >= 0 && column < columns ? {row, column} : null
  }

  function ask() {
    asked += 1
    plot.pointed.data = {id: [asked], row: [under.row], column: [under.column]}
  }

  function leave() {
    pointer = under = null
    tip.hide()
  }

  function point(event) {
    const cell = cellAt(event)
    if (!cell) return leave()
    pointer = event.x
    tip.place(event)
    if (under && under.row === cell.row && under.column === cell.column) return
    under = cell
    if (asked === answered) ask()
  }

  function read() {
    const {id, title, label, value, rank, step} = plot.answer.data
    answered = id[0]
    if (answered !== asked) return
    if (opens === answered && step[0] >= 0) return open(rank[0], step[0])
    if (!under) return
    const question = plot.pointed.data
    if (question.row[0] !== under.row || question.column[0] !== under.column) return ask()
    tip.fill(title[0], label, value)
  }

  function open(rank, step) {
    const address = new URL(document.body.dataset.timeline, location.href)
    const theme = new URLSearchParams(location.search).get("theme")
    address.searchParams.set("step", step)
    address.searchParams.set("rank", rank)
    if (theme) address.searchParams.set("theme", theme)
    location.assign(address)
  }

  // --- wiring ---------------------------------------------------------------------------------------------------
  const on = (model, property, act) => model.property(property).change.connect(act)
  on(plot.scale, "data", showScale)
  on(plot.answer, "data", read)
  on(root, "inner_width", shrink)
  on(steps, "start", () => tip.hide())
  root.on_event("mousemove", point)
  root.on_event("tap", (event) => {
    under = cellAt(event)
    if (!under) return
    ask()
    opens = asked
  })
  area.addEventListener("mouseleave", leave)
  document.getElementById("fit").addEventListener("click", showAll)
  for (const radio of radios) radio.addEventListener("change", choose)
  showScale()
  shrink()
  window.overlapscope.keepRange(steps, show)
  window.overlapscope.paintPlots()
}
