// Switches, mouse and keys of the heatmap of ranks and steps. dashboards/plots/heatmap.py decides what is drawn and
// what a cell contains: this script sends requests.
window.overlapscope.startHeatmap = (plot) => {
  const {root, step_range: steps} = plot
  const whole = () => steps.bounds // more of them while a recording is followed
  const area = document.getElementById("heatmap")

  // --- switches -------------------------------------------------------------------------------------------------
  const radios = [...document.querySelectorAll(".switches input")]
  const chosen = (name) => radios.find((radio) => radio.name === name && radio.checked)?.value

  const choice = () => ({figure: chosen("figure"), grouping: chosen("grouping") ?? "ranks"})
  const room = () => Math.max(50, Math.floor(root.inner_width || area.clientWidth))

  function draw() {
    plot.choice.data = {figure: [choice().figure], grouping: [choice().grouping], columns: [room()]}
    tip.leave()
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
  const {show, zoom, move} = window.overlapscope.rangeMoves(steps, {
    get shortest() { return steps.min_interval },
    get lowest() { return whole()[0] },
    get highest() { return whole()[1] },
  })

  function showAll() {
    show(...whole())
    const [top, bottom] = plot.row_range.bounds
    plot.row_range.setv({start: bottom, end: top})
  }

  const pick = (index) => () => radios.filter((radio) => radio.name === "figure")[index].click()
  const keys = {
    1: pick(0),
    2: pick(1),
    3: pick(2),
    w: () => zoom(0.8, pointer),
    s: () => zoom(1.25, pointer),
    a: () => move(-0.1),
    d: () => move(0.1),
    0: showAll,
  }

  window.overlapscope.onKeys(keys)

  // --- tooltips -------------------------------------------------------------------------------------------------
  let pointer = null

  function cellAt({x, y}) {
    const {image, x: left, y: top, dw, dh} = plot.cells.data
    const [rows, columns] = image[0].shape
    const column = Math.floor(((x - left[0]) / dw[0]) * columns)
    const row = Math.floor(((y - top[0]) / dh[0]) * rows)
    return row >= 0 && row < rows && column >= 0 && column < columns ? {row, column} : null
  }

  const tip = window.overlapscope.askingTip({
    area, figure: root, request: plot.pointed, response: plot.answer, at: cellAt,
  })

  // A click opens the step and the rank that are largest in a cell.
  const OPENS = -1

  function ask(event) {
    const cell = cellAt(event)
    if (cell) plot.pointed.data = {id: [OPENS], row: [cell.row], column: [cell.column]}
  }

  function open() {
    const {id, rank, step} = plot.answer.data
    if (id[0] === OPENS && step[0] >= 0) window.overlapscope.openTimeline({step: step[0], rank: rank[0]})
  }

  // --- wiring ---------------------------------------------------------------------------------------------------
  const {on} = window.overlapscope
  on(plot.scale, "data", showScale)
  on(plot.answer, "data", open)
  on(root, "inner_width", shrink)
  window.addEventListener("followed", shrink)
  on(steps, "start", tip.leave)
  root.on_event("mousemove", (event) => (pointer = cellAt(event) && event.x))
  root.on_event("tap", ask)
  area.addEventListener("mouseleave", () => (pointer = null))
  document.getElementById("fit").addEventListener("click", showAll)
  for (const radio of radios) radio.addEventListener("change", choose)
  showScale()
  shrink()
  window.overlapscope.keepRange(steps, show, whole)
  window.overlapscope.paintPlots()
}
